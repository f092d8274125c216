"""Functions in LLVM's language, compiled for the CPU at hand where llvmlite is installed: no word of what is computed."""
