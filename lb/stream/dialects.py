"""The APIs whose streams can be continued, by path."""

from __future__ import annotations

from collections.abc import Mapping

from lb.http.api_paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from lb.stream.chat_completions import ChatCompletions
from lb.stream.dialect import Dialect
from lb.stream.messages_api import Messages
from lb.stream.responses_api import Responses

DIALECTS: Mapping[bytes, Dialect] = {
    CHAT: ChatCompletions(CHAT),
    COMPLETIONS: ChatCompletions(COMPLETIONS),
    RESPONSES: Responses(),
    MESSAGES: Messages(),
}
