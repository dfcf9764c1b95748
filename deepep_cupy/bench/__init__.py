"""What an operation costs on these ranks, beside what the links carry: library and command."""
