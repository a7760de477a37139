"""The page of `serve dashboard`: its port, its guards, its files."""
