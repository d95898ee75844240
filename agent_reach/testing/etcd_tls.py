"""Certificates for the etcd of tests."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

__all__ = ["EtcdTls"]


@dataclass(frozen=True, slots=True)
class EtcdTls:
    """PEM files for an etcd that serves over TLS.

    `cert` and `key` are the server's, `ca` is what clients shall trust (None: the roots of the system). With
    `client_ca` etcd demands a client certificate from it; `EtcdServer.url` then shows the server's own as the
    client's too, so it must be good for both.
    """

    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str] | None = None
    client_ca: str | os.PathLike[str] | None = None

    @property
    def client_files(self) -> dict[str, str]:
        """What a client needs, by the names of the registry url: `ca`, `cert` and `key` as far as they apply."""
        files = {} if self.ca is None else {"ca": os.fspath(self.ca)}
        if self.client_ca is not None:
            files |= {"cert": os.fspath(self.cert), "key": os.fspath(self.key)}
        return files

    def server_arguments(self) -> dict[str, str]:
        """The arguments for etcd."""
        files = {"--cert-file": os.fspath(self.cert), "--key-file": os.fspath(self.key)}
        if self.client_ca is not None:
            files |= {"--trusted-ca-file": os.fspath(self.client_ca)}
        return files

    def context(self) -> ssl.SSLContext:
        """What a client of the standard library needs."""
        context = ssl.create_default_context(cafile=self.ca)
        if self.client_ca is not None:
            context.load_cert_chain(self.cert, self.key)
        return context
