"""Why a run died: what was recorded, and one verdict."""
