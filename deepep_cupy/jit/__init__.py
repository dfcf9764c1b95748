"""Kernel text to machine code to launch. Knows no kernel by name."""
