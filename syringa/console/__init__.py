"""The browser console: static files that the API process serves. README.md describes how they are written."""
