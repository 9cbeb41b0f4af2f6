"""Adapters that let trainers of other frameworks push through a `Sender`; each loads its framework when it is used."""
