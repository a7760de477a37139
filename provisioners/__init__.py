"""Clouds, a package each, behind one small port (`base.Provisioner`).

The law of this floor: a provisioner knows its cloud and nothing of services, policies, the store or the load
balancer. It is synchronous (the SDKs are), keeps no state that the cloud does not keep for it, and reports
trouble only by the classes of `errors`. A cloud's SDK is imported when that cloud is used, not before.
"""
