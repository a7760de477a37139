"""A plug-in's cloud as a provisioner: its machines behind a guard, and all that is the same on every cloud."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from policies.model import Offer, Role
from provisioners.assembly import (
    USER,
    VmCloudProvisioner,
    VmSection,
    login_by,
    login_key_of,
    older_logins,
    within,
)
from provisioners.clock import unix_now
from provisioners.offers.catalog.model import Catalog
from provisioners.offers.lb_instance_types import small_offers
from provisioners.own_address import OwnAddresses
from provisioners.plugin_guard import guarded
from provisioners.plugins import CloudPlugin, PluginError, Setup, in_its_markets
from provisioners.port.base import Requirements
from provisioners.port.lease import terms_of
from provisioners.port.vm import Machine, MachineOrder
from provisioners.remote.first_login import FirstLogins
from provisioners.remote.ssh_keys import Keys, generations, lasting_login_script, user_data


def provisioner_of(
    plugin: CloudPlugin,
    section: VmSection,
    catalog: Catalog,
    secret: bytes,
    *,
    own: OwnAddresses | None = None,
    folder: Path | None = None,
    now: Callable[[], float] = unix_now,
) -> VmCloudProvisioner:
    """`folder` is where host keys of the first login are kept. Raises PluginError, and ValueError for a wrong section."""
    if section.regions is not None:
        catalog = within(catalog, section.regions, plugin.name)
    try:
        machines = guarded(plugin.machines(Setup(section, catalog, now, time.sleep)))
    except ValueError:
        raise  # the section is wrong
    except Exception as error:
        raise PluginError(f"the plug-in {plugin.name!r} failed: {type(error).__name__}: {error}") from error

    def script(machine: Machine) -> str:
        """Return what other clouds run as user data; it depends on keys and user alone."""
        keys = Keys(generations(secret)[0], machine.owner)
        order = MachineOrder(
            token=machine.token,
            owner=machine.owner,
            service=machine.service,
            replica_id=machine.replica_id,
            rank=machine.rank,
            num_nodes=machine.num_nodes,
            zone=machine.zone,
            instance_type=machine.instance_type,
            capacity_type=machine.capacity_type,
            public_key=login_key_of(keys, machine).public,
            user=USER,
        )
        terms = terms_of(section.dead_man_minutes, machine.token)
        login = lasting_login_script(USER, login_key_of(keys, machine))
        return login + user_data(order, keys.host(machine.token), terms)

    first = None
    if plugin.first_user is not None:
        way = section.way
        first = FirstLogins(
            plugin.first_user,
            lambda machine: login_by(way, machine, secret),
            script,
            folder,
            older=lambda machine: older_logins(way, machine, secret),
        )

    class PluginProvisioner(VmCloudProvisioner):
        name = plugin.name

        def offers(self, need: Requirements) -> Sequence[Offer]:
            if need.role is not Role.LOAD_BALANCER:
                return super().offers(in_its_markets(plugin, need))
            zones = (row.zone for row in catalog.rows)
            return small_offers(need, self.name, zones, plugin.small) if plugin.small else []

    return PluginProvisioner(
        machines, section, catalog, secret, own=own, now=now, first_login=first, folder=folder
    )
