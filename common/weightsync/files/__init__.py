"""Versions as files: a trainer writes them into a folder or an object store, and ``weightsync follow`` pushes them."""

from weightsync.files.folder import Folder, Written

__all__ = ["Folder", "Written"]
