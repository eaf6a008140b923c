"""The description of the REST surface: an OpenAPI 3.1 document and a page that renders it.

`routes.TABLE` says which paths and methods there are, `operations.OPERATIONS` what each of them is for, `schemas.SCHEMAS`
what goes in and out. A route without an operation fails when the document is made, and so in a test.
"""

from neptrio.transport.rest.openapi.document import document
from neptrio.transport.rest.openapi.page import MOST_MODELS, page

__all__ = ["MOST_MODELS", "document", "page"]
