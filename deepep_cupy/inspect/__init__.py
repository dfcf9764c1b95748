"""CUDA text, PTX and machine code of one line side by side: pages, extracts, comparisons."""
