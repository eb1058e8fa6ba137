"""The network interface that a run listens on: that of the stores of its launcher and its ranks, of gloo and NCCL.

PyTorch's stores listen on all interfaces, and whoever reaches one can stop a run, or change what its ranks tell each
other.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from typing import Any

import torch.distributed as dist

SIOCGIFADDR = 0x8915  # of Linux: the address of an interface
PLACES = (
    "torch.distributed",
    "torch.distributed.rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
"""Where torchrun and ranks take the class of stores from."""


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface. ValueError that names the interfaces there are."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(f"INTERFACE={interface} has no address ({error}); there are {names}") from error
    return socket.inet_ntoa(answer[20:24])


def listen_on(interface: str) -> str:
    """Let PyTorch's stores, gloo and NCCL of this process and its children listen there alone; returns its address."""
    address = address_of(interface)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface != "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)

    class Store(dist.TCPStore):
        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            *rest: Any,
            **options: Any,
        ) -> None:
            if is_master:
                listener = socket.create_server((address, port), backlog=1024)
                host_name, port = address, listener.getsockname()[1]
                options["master_listen_fd"] = listener.detach()
            super().__init__(host_name, port, world_size, is_master, *rest, **options)

    for name in PLACES:
        if name in sys.modules:
            setattr(sys.modules[name], "TCPStore", Store)  # noqa: B010
    return address
