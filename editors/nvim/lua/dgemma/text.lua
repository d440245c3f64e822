-- Texts as bytes of UTF-8, without the editor: what is sent, and where an answer goes.

local M = {}

M.MARK = "<FILL>"

-- The server reads these as parts of the message of an edit, wherever they stand.
local TAGS = {
  "code_to_edit",
  "current_file_content",
  "edit_diff_history",
  "recently_viewed_code_snippets",
  "recently_viewed_code_snippet",
}

local function is_inside_a_character(text, byte)
  local value = text:byte(byte)
  return value ~= nil and value >= 0x80 and value < 0xC0
end

--- The last `most` bytes, without half a character at the beginning.
function M.tail(text, most)
  local first = math.max(1, #text - most + 1)
  while first > 1 and is_inside_a_character(text, first) do
    first = first + 1
  end
  return text:sub(first)
end

--- The first `most` bytes, without half a character at the end.
function M.head(text, most)
  local last = math.min(#text, most)
  while last > 0 and is_inside_a_character(text, last + 1) do
    last = last - 1
  end
  return text:sub(1, last)
end

--- The texts before, between and after the marks.
function M.pieces(text)
  local found, from = {}, 1
  while true do
    local first, last = text:find(M.MARK, from, true)
    found[#found + 1] = text:sub(from, first and first - 1)
    if not first then
      return found
    end
    from = last + 1
  end
end

--- Row and column, from 0, behind so many bytes.
function M.position(text, bytes)
  local row, line = 0, 1
  while true do
    local stop = text:find("\n", line, true)
    if not stop or stop > bytes then
      return row, bytes - line + 1
    end
    row, line = row + 1, stop + 1
  end
end

--- The bytes before a row, from 0.
function M.offset(text, row)
  local before = 0
  for _ = 1, row do
    before = text:find("\n", before + 1, true)
  end
  return before
end

--- The message of an edit, or nil and the tag that the text must not hold.
function M.edit_message(instruction, before, region, after)
  local all = table.concat({ instruction, before, region, after }, "\n")
  if all:find("<|cursor|>", 1, true) then
    return nil, "<|cursor|>"
  end
  for _, tag in ipairs(TAGS) do
    local found = all:match("<|/?" .. tag .. "|>")
    if found then
      return nil, found
    end
  end
  return table.concat({
    instruction,
    "\n<|current_file_content|>\n",
    before,
    "<|code_to_edit|>\n",
    region,
    "\n<|/code_to_edit|>",
    after,
    "<|/current_file_content|>",
  })
end

return M
