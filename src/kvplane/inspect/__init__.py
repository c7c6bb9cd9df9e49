"""What a saved session or cut holds, for people: facts, and a page that needs no network."""

from kvplane.inspect.facts import Inspection, found, inspected
from kvplane.inspect.markup import page

__all__ = ["Inspection", "found", "inspected", "page"]
