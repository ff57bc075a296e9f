"""What the SARIF that the audit writes is held to, as a JSON schema."""

#: What SARIF 2.1.0 requires of the objects that are written, and what GitHub asks for besides.
SARIF = {
    "type": "object",
    "required": ["version", "$schema", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "minItems": 1,
            "items": {
                "required": ["tool", "results", "invocations"],
                "properties": {
                    "tool": {
                        "required": ["driver"],
                        "properties": {"driver": {"$ref": "#/driver"}},
                    },
                    "results": {"items": {"$ref": "#/result"}},
                    "invocations": {"items": {"$ref": "#/invocation"}},
                },
            },
        },
    },
    "tool": {"required": ["driver"], "properties": {"driver": {"$ref": "#/driver"}}},
    "driver": {
        "required": ["name", "rules"],
        "properties": {
            "rules": {
                "uniqueItems": True,
                "items": {
                    "required": ["id", "shortDescription"],
                    "properties": {"shortDescription": {"$ref": "#/message"}},
                },
            }
        },
    },
    "result": {
        "required": ["ruleId", "ruleIndex", "level", "message", "locations"],
        "properties": {
            "level": {"enum": ["none", "note", "warning", "error"]},
            "message": {"$ref": "#/message"},
            "locations": {"maxItems": 1, "items": {"$ref": "#/location"}},
        },
    },
    "location": {
        "properties": {
            "physicalLocation": {
                "required": ["artifactLocation"],
                "properties": {
                    "artifactLocation": {
                        "required": ["uri"],
                        "properties": {"uri": {"pattern": r"^[!-~]+$"}},
                    },
                    "region": {
                        "required": ["startLine"],
                        "properties": {"startLine": {"type": "integer", "minimum": 1}},
                    },
                },
            }
        }
    },
    "invocation": {
        "required": ["executionSuccessful"],
        "properties": {
            "executionSuccessful": {"type": "boolean"},
            "toolExecutionNotifications": {
                "items": {
                    "required": ["message"],
                    "properties": {"message": {"$ref": "#/message"}},
                }
            },
        },
    },
    "message": {"required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}},
}
