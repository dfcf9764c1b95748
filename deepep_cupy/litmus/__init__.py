"""Which loads see what another GPU has just written: the experiment and its command."""
