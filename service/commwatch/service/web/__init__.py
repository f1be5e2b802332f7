"""HTTP for people and their tools: the JSON API and health."""

from commwatch.service.web.application import create_app

__all__ = ["create_app"]
