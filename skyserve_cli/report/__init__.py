"""Reports of simulations and of running services: the history of a service, its figures, and the page that shows them."""
