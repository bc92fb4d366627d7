"""Methods of other systems, in the same cost model: what they choose among, and by what."""
