"""What the user calls: ``Buffer``, its results, its handles, and the checks of every argument."""
