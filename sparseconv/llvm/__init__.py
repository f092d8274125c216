"""Functions in LLVM's language, compiled for this CPU where llvmlite is installed: no word of what is computed."""
