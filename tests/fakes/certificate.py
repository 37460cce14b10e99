"""A certificate for 127.0.0.1 that signs itself, and its key: public, for tests alone."""

from __future__ import annotations

from typing import Final

CERTIFICATE: Final = """\
-----BEGIN CERTIFICATE-----
MIIBnDCCAUGgAwIBAgIUWk3aVogxVt5YomExA7qGpVYZkSowCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJMTI3LjAuMC4xMCAXDTI2MTEzMDA2NDkyMVoYDzIxMjYxMTA2
MDY0OTIxWjAUMRIwEAYDVQQDDAkxMjcuMC4wLjEwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAR3V5EIGgg5c0enm7pkxnyemZEbw666k2tobmbY+p/nc7EZuBJiTiUd
ltWX2T+2qo2JFF8BBV6Tp1s6Y1osNFD8o28wbTAdBgNVHQ4EFgQUd8jLwEIjBvXa
XaacP9Fyfsn+MukwHwYDVR0jBBgwFoAUd8jLwEIjBvXaXaacP9Fyfsn+MukwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARhwR/AAABgglsb2NhbGhvc3QwCgYIKoZI
zj0EAwIDSQAwRgIhAPj6VVhjsiGRL5Nnnt8ODZFyqygTSz4amZtCoc9recupAiEA
yWaiM4uLmpPlqv/qMXCob32agfnzj8c0mAMsitOS4IA=
-----END CERTIFICATE-----
"""

PRIVATE_KEY: Final = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgP/N0HFKBL/GyhNsX
bBGCaALweiStJsc81HkXzz3mUmuhRANCAAR3V5EIGgg5c0enm7pkxnyemZEbw666
k2tobmbY+p/nc7EZuBJiTiUdltWX2T+2qo2JFF8BBV6Tp1s6Y1osNFD8
-----END PRIVATE KEY-----
"""
