"""By which addresses other hosts are told to reach this one."""

from __future__ import annotations

import socket

import pytest

from holdfast._run.ranks import world

_NAMES = {
    "master": ["10.0.0.5"],
    "localhost": ["127.0.0.1", "::1"],
    "this-host": ["127.0.1.1", "10.0.0.5", "fe80::1%eth0"],
    "gateway": ["192.0.2.7"],
}


@pytest.fixture(autouse=True)
def _names(monkeypatch):
    def resolve(name, *_, **__):
        if name not in _NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in _NAMES[name]]

    monkeypatch.setattr(world.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(world, "host_name", lambda: "this-host")
    monkeypatch.setattr(world, "is_own", lambda address: address != "192.0.2.7")
    for name in ("MASTER_ADDR", "HOLDFAST_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def test_loopback_and_what_means_something_on_one_cable_only_are_left_out():
    assert world.addresses() == ["10.0.0.5"]


def test_a_master_of_localhost_is_no_address_for_others(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert world.addresses() == ["10.0.0.5"]


def test_the_chosen_address_comes_first_though_it_is_that_of_a_gateway(monkeypatch):
    monkeypatch.setenv("HOLDFAST_ADDRESS", "gateway")
    monkeypatch.setenv("MASTER_ADDR", "master")
    assert world.addresses() == ["192.0.2.7", "10.0.0.5"]


def test_names_that_do_not_resolve_are_no_addresses(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "nowhere")
    monkeypatch.setattr(world, "host_name", lambda: "unknown")
    assert world.addresses() == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_address_of_this_host_can_be_bound(monkeypatch, address):
    monkeypatch.undo()
    if ":" in address and not socket.has_ipv6:
        pytest.skip("this system has no IPv6")
    assert world.is_own(address) or ":" in address
    assert not world.is_own("2001:db8::7" if ":" in address else "192.0.2.7")
