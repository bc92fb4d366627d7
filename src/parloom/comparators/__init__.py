"""Plans as others make them, in the same cost model: rules of thumb, plans by hand, systems."""
