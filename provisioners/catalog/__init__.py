"""What machines there are, where, and what they cost: packaged with the product, refreshed from the clouds' price APIs.

The law of this folder: a price has an origin (who says so, as of when, how sure), and keeps it to the screen. Nothing
here asks a cloud but `refresh`, and that only when a user says so. See `data/README.md` for the packaged prices.
"""

from provisioners.catalog.model import Catalog, CatalogError, Listing, Origin, Price, Quality, Row, Shape
from provisioners.catalog.store import load, packaged

__all__ = [
    "Catalog",
    "CatalogError",
    "Listing",
    "Origin",
    "Price",
    "Quality",
    "Row",
    "Shape",
    "load",
    "packaged",
]
