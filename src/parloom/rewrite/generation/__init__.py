"""How rules are found, proved a second time and reduced to a basis: nothing that plans reads it."""
