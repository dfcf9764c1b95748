"""The commands behind ``python -m deepep_cupy``: one module a command, imported when asked for."""
