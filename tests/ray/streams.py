"""Streams of numbered requests, each on a connection and a thread of its own."""

import json
import threading
from typing import Any

import httpx

from tests.ray.server_process import ServerProcess


def fields(number: int, num_tokens: int) -> dict[str, Any]:
    """The request of this number; every other one is sampled."""
    return {
        "prompt": f"Tell me about the number {number}:",
        "max_tokens": num_tokens,
        "temperature": 0.8 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
    }


def solo_texts(server: ServerProcess, count: int, num_tokens: int) -> list[str]:
    """What each request gives alone."""
    answers = (server.complete(**fields(number, num_tokens)) for number in range(count))
    return [answer["choices"][0]["text"] for answer in answers]


class Stream(threading.Thread):
    """One streamed request.

    Attributes:
        api_id: known from the first event on.
        is_whole: the stream came to its regular end.
        error: the server's word when it did not; empty when the connection broke.
    """

    def __init__(self, server: ServerProcess, number: int, num_tokens: int) -> None:
        super().__init__()
        self._url = f"{server.url}/v1/completions"
        self._body = {"model": server.model, **fields(number, num_tokens), "stream": True}
        self.api_id = ""
        self.text = ""
        self.error = ""
        self.is_whole = False

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=300) as answer:
                if answer.status_code != httpx.codes.OK:
                    self.error = answer.read().decode()
                    return
                for line in answer.iter_lines():
                    self._take(line)
        except httpx.TransportError:
            pass  # its door is gone; `is_whole` says so

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_whole = not self.error
        elif line:
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                self.error = event["error"]["message"]
                return
            self.text += event["choices"][0]["text"]
            self.api_id = event["id"]
