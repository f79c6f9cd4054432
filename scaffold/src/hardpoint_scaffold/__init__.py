"""The command ``hardpoint new``: writes a plugin that works before it is edited."""
