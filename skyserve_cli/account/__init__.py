"""What a service or a simulation achieved and cost, as values. Pure; `serve report` and the dashboard share it."""
