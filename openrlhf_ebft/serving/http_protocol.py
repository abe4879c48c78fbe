"""The HTTP protocol of Ray Serve's proxy (uvicorn's), with broken requests answered by error objects."""

from __future__ import annotations

from http import HTTPStatus

from uvicorn import config
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from openrlhf_ebft.serving.errors import error_body

_BROKEN = "the request is not HTTP/1.1: its head or the framing of its body is broken"


class JSONErrorProtocol(AutoHTTPProtocol):
    """uvicorn's protocol; what cannot be read as HTTP gets a 400 in JSON instead of plain text."""

    def send_400_response(self, msg: str) -> None:
        """Answers a request that no application will see, and closes the connection."""
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_answering:  # bytes in the middle of an answer would be taken for a part of it
            body = error_body(_BROKEN, HTTPStatus.BAD_REQUEST)
            lines = ("HTTP/1.1 400 Bad Request", "content-type: application/json", "connection: close")
            head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
            self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def use_in_this_process() -> None:
    """Makes it the protocol of uvicorn servers that name none, as Ray Serve's proxy does."""
    config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{JSONErrorProtocol.__name__}"
