"""What must survive a kill -9: services, versions, replicas, memory and the event log, in one SQL database.

The law of this room: typed columns (JSON only for specs and policy memory), no pickle, no secret in clear, no
decision and no network. Every verb of `store.Store` is one transaction.
"""
