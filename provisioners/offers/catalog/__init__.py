"""What machines there are, where, and what they cost: packaged with the product, refreshed from the clouds' price APIs.

Every price has an origin (its source, its date, its quality), which is shown with it. Nothing
here sends requests to a cloud but `refresh`, and that only when a user says so; what an account can have is discovered by its
cloud's own package. See `data/README.md` for the packaged prices.
"""

from provisioners.offers.catalog.model import (
    Catalog,
    CatalogError,
    Listing,
    Origin,
    Price,
    Quality,
    Row,
    Shape,
)
from provisioners.offers.catalog.store import Stock, load, packaged, stock

__all__ = [
    "Catalog",
    "CatalogError",
    "Listing",
    "Origin",
    "Price",
    "Quality",
    "Row",
    "Shape",
    "Stock",
    "load",
    "packaged",
    "stock",
]
