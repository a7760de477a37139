"""The controller's API: the HTTP routes, the service behind them, the JSON views, and the client that the CLI uses."""
