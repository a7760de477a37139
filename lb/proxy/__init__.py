"""The path of a request: the client connection, attempts on targets, and the relay of the response.

The hot path of the agent. No task, no future and no timer per request.
"""
