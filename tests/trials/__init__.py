"""Random programs over several ranks, an oracle that knows how they end, and faults to put in."""
