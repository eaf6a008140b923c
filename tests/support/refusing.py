"""Whether a server that is stopping already turns clients away."""

from __future__ import annotations

import tritonclient.http as httpclient


def refuses(address: str) -> bool:
    """Whether a server turns new HTTP connections away."""
    try:
        with httpclient.InferenceServerClient(address) as client:
            return not client.is_server_ready()
    except Exception:
        return True
