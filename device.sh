set -e
export SPARSECONV_CACHE_DIR=/tmp/pwc PYTHONPATH=. PYTHONUNBUFFERED=1
python3 -c "import sparseconv.pointwise as p; p.relu; print('import ok')"
[ -n "$SKIP" ] || python3 device_check.py || exit 1
timeout 200 python3 -m benchmarks.pointwise --quick --sweep --json $OUT/pointwise.json
