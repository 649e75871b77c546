"""The generate job: a driver that leases units to verifier replicas and commits what they return.

`plan` finds out what will be done before a model is loaded, `leases` is the bookkeeping, `actor` runs in the replicas.
"""
