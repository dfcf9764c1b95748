"""The simulator's Python half: builds kernel text for the host, drives it, judges the outcome."""
