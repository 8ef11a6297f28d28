"""What a bundle's folder holds: `manifest.json` as dataclasses, as JSON, and what is checked."""
