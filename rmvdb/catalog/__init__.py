"""Model versions and galleries: add, adopt, check, take and remove them. Nothing here runs an upgrade."""
