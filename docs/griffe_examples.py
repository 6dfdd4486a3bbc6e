"""Shows `Example:` of a docstring as code, as griffe does for `Examples:`; named in mkdocs.yml."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section in every docstring that the API pages read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Takes a module, class, function or attribute that was loaded."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
