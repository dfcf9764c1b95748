"""Cases, inputs, comparison and process control, shared by tests, examples, check and bench."""
