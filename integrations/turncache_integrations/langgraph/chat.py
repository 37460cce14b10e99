"""``ChatOpenAI`` that needs nothing around it."""

from __future__ import annotations

from typing import Self

import langchain_openai
from pydantic import model_validator

from turncache_integrations.langgraph.clients import our_clients


class ChatOpenAI(langchain_openai.ChatOpenAI):
    """``langchain_openai.ChatOpenAI`` whose calls are in the running graph's session.

    Everything else is upstream's: its constructor, its results, what ``bind_tools`` and the
    like return. Outside a graph, or without a thread, the innermost block counts, and else
    the conversation is followed by its content. Hosted providers get what the stock model
    sends.
    """

    @model_validator(mode="after")
    def _put_our_clients_in(self) -> Self:
        for field, client in our_clients(self).items():
            setattr(self, field, client)
        return self
