"""Scalar functions in Triton's language; importing one of these modules imports Triton, importing this one does not."""
