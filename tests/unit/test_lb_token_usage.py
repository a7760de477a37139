"""How many tokens a response reports, in whatever form its engine writes them."""

from __future__ import annotations

import pytest

from lb.stream.token_usage import usage_of


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (b'{"prompt_tokens":12,"total_tokens":46,"completion_tokens":34}', (12, 34)),
        (b'{"prompt_tokens":12,"completion_tokens":34,"total_tokens":46}', (12, 34)),
        (b'{"prompt_tokens": 12, "completion_tokens": 34}', (12, 34)),
        (b'{"completion_tokens":34,"prompt_tokens":12}', (12, 34)),
        (b'{"prompt_tokens":12,"audio_tokens":5,"completion_tokens":34}', (12, 34)),
        (b'{"prompt_tokens":12,"total_tokens":46}', (12, 0)),
        (b'{"prompt_tokens":,"completion_tokens":34}', (0, 34)),
        (b'{"prompt_tokens":12,"completion_tokens":"34"}', (12, 0)),
        (b'{"prompt_tokens":1234567890123,"completion_tokens":34}', (0, 34)),
        (b'{"prompt_tokens":12,"completion_tokens":34x}', (12, 0)),
        (b'{"input_tokens":12,"output_tokens":34}', (12, 34)),
        (b"null", None),
    ],
)
def test_the_last_report_of_a_whole_response_counts(usage: bytes, tokens: tuple[int, int] | None) -> None:
    earlier = b'{"choices":[{"text":"say \\"usage\\":{}"}],'
    found = usage_of(earlier + b'"usage":' + usage + b',"id":"x"}')
    assert (None if found is None else (found.prompt, found.out)) == tokens
