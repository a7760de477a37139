"""LoRA adapters that clients load and unload, as vLLM has it. They change no token here: they are names that are served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyserve_cli.engine.errors import BadRequest, ModelNotFound


class LoadedAdapters:
    """The adapters by name, and where each is from."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._paths: dict[str, str] = {}

    def load(self, body: Mapping[str, Any]) -> str:
        """Load what the body names; return the response. Raises BadRequest."""
        name, path = (body.get(field) for field in ("lora_name", "lora_path"))
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self._paths or name == self._model:
            raise BadRequest(f"The lora adapter '{name}' has already been loaded.")
        self._paths[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: Mapping[str, Any]) -> str:
        """Unload what the body names; return the response. Raises BadRequest or ModelNotFound."""
        name = body.get("lora_name")
        if not isinstance(name, str) or not name:
            raise BadRequest("'lora_name' must be provided.")
        if self._paths.pop(name, None) is None:
            raise ModelNotFound(name, self._model)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def served(self, body: Mapping[str, Any]) -> str:
        """Return the model or adapter that serves the request of this body."""
        asked = body.get("model")
        return asked if isinstance(asked, str) and asked in self._paths else self._model

    def cards(self, card: Mapping[str, object]) -> list[dict[str, object]]:
        """Return the entries of adapters in a list of models, whose entry for the model is `card`."""
        return [
            {**card, "id": name, "root": path, "parent": self._model} for name, path in self._paths.items()
        ]
