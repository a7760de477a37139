"""Clouds, a package each, behind one small interface (`port.base.Provisioner`).

`port` has the interfaces, `offers` the catalog and the matching, `remote` the work on machines over SSH. `vm_provisioner` makes
a provisioner of a cloud that rents machines, and `assembly` adds keys, offers and firewalls to it.

The packages of clouds use the same names for the same roles: `api` (calls), `translate` (our values to the cloud's and
back; pure), `machines` (`port.vm.Machines`), `network`, `orphans` (billed resources that belong to nothing), `errors` (what an
error means for the caller), `prices` (spot prices now) and `check` (`serve check`). `cloud` composes them. A package that
has more modules explains why.

A provisioner knows its cloud and nothing of services, policies, the database or the load balancer. It is synchronous (the SDKs
are), keeps no state that the cloud does not keep for it, and raises only the classes of `port.errors`. The SDK of a cloud is
imported when that cloud is used, not before.
"""
