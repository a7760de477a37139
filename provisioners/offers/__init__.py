"""From what a service needs to what a cloud can sell: the catalog, matching, prices, and why nothing matches."""
