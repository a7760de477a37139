"""The state that survives a kill -9: services, versions, replicas, memory and the event log, in one SQL database.

Rules of this package: typed columns (JSON only for specs and policy memory), no pickle, no secret in clear, no
decision and no network. Every verb of `store.Store` is one transaction.
"""
