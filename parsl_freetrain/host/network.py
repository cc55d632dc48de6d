"""This computer's addresses."""

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface; raises OSError if there is none."""
    request = struct.pack('256s', interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])


def interface_with(address: str) -> str | None:
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except OSError:
            continue
    return None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == 'localhost'


def own_address() -> str:
    """The address that others likely see: of the default route, or else of the host's name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            # Connecting a datagram socket sends nothing.
            sock.connect(('192.0.2.1', 9))
            return str(sock.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())
