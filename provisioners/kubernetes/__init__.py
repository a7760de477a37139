"""Kubernetes: a replica is a Pod, or one Pod per node of it; `cloud` makes a provisioner of the clusters that config.yaml names.

There are no machines, no SSH and no user data here: the kubelet runs the scripts, and one watch per namespace reports the
state of all Pods. Only `api` sends requests, by the official client. Beside the
modules that clouds share: `settings` is what config.yaml says, `quantities` reads amounts like `500m`, `placement` (a pure
part of `translate`) says on which nodes a Pod may be, `scripts` is what the containers run, `files` carries the work
directory, and `logs` reads what Pods printed. `pod_state` reads a Pod, `containers` what its containers report, `node_state` its node,
and `sightings` since when something holds, all of them pure. `pod_cache` and `node_cache` keep what was last known of all Pods and
nodes, `watch` feeds them, `pod_events` says why Pods are stuck, and `nodes` makes offers of a cluster's nodes.

A load balancer is a Deployment with a Service: `agent_objects` makes them (pure), `agents` launches and rolls them out, `agent_cache`
keeps what was last known of them.

There is no `orphans`: everything but a Pod is owned by a Pod, or by the Deployment of a load balancer, so the cluster deletes it with that Pod, and Pods are listed as
instances. `dead_man` renews the lease of Pods, and `reaper` is what a CronJob in the cluster runs when no controller does any more.
"""
