"""An LLM engine without a GPU: it serves OpenAI's API and takes the time a real engine would take.

Code that decides is pure; code with sockets and clocks is thin.

- `profiles` (how long an iteration takes on which GPU), `kv` (the prefix cache), `model` (continuous
  batching) and `text` (tokens and the words a request gets) know no clock and no socket: the same
  `EngineModel` runs in virtual time inside a simulator and in real time behind a port.
- `runner` is the only place that waits; `server` is the only place that listens.
- Nothing here is imported by the controller's tick, and importing it stays cheap (no pydantic, no
  SQLAlchemy): every replica of a local service starts one of these processes.
"""
